"""One file a stage of the quickstart; see cli/stage.py."""
