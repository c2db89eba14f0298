"""The commands of `verl-tlt`: no run imports them."""
