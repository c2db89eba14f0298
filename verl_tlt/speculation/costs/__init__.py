"""PURE. What an engine step costs by batch, context and draft length: measured, fitted, kept."""
