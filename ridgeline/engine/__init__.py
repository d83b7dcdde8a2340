"""Running models: from a folder to something that answers."""
