"""RankLens: run one rank of a distributed training job alone, in the job's own world."""
