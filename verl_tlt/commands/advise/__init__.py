"""`verl-tlt advise`: would TLT pay in a run, and which number decides? From its recipe, better with a run of it."""
