"""Reading and writing files that others may have written."""
