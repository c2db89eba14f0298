"""`verl-tlt report`: reads a run's trace back, and shows it as table, picture and page."""
