"""What activation and the doctor both ask of a recipe, before any device is touched."""
