"""The event log that every process writes, and what a step's events come to as metrics."""
