"""PURE. When idle devices may train the drafter: planners, and the rules of verl's trainer modes."""
