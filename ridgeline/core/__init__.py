"""Facts and rules every other room stands on; imports nothing of ours and no torch at import time."""
