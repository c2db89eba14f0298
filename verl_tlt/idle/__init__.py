"""PURE. Whose idle time may train the drafter: planners, failure budget, and the rules of verl's trainer modes."""
