"""Outside agents on the turn path: OpenAI-compatible sessions whose tokens become trajectories."""
