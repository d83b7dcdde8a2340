"""Facts and rules that every other room stands on; imports no torch at import time."""
