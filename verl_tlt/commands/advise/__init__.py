"""`verl-tlt advise`: how much TLT could gain in a run that you have, by arithmetic on the metrics that verl logged."""
