"""The column loop of GPTQ over one block: round a column, spread its error, go on."""
