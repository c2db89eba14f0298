"""A small policy, its task and what a run of them needs: for tests, benchmarks and the demo."""
