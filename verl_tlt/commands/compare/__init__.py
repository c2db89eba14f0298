"""`verl-tlt compare`: stock verl and TLT in turns on the user's own recipe, and what that says."""
