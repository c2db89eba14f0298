"""PURE. Who decides the draft length: one class each, behind one protocol."""
