"""RankLens for DeepSpeed."""
