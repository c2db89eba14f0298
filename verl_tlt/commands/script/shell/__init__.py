"""A reader of shell scripts: it follows one as bash would, without running a line of it."""
