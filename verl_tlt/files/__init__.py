"""Files and folders that are replaced whole, and JSON objects."""
