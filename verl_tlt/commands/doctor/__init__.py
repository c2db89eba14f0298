"""`verl-tlt doctor` and `verl-tlt calibrate`."""
