"""The command line: one file a command, each also a function of the same name."""
