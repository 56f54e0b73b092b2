"""Programs to start from; they know nothing of RankLens."""
