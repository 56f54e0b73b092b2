"""RankLens for Megatron-core and Megatron-LM."""
