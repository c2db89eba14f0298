"""`verl-tlt report`: reads a run's trace back, and shows whether it paid, as a table and as a page."""
