"""RankLens for Megatron-core and Megatron-LM.

    python -m ranklens_megatron pretrain_gpt.py ARGS --ranklens-rank 5 --ranklens-trace DIR

Scripts with a parser of their own: ``ranklens_megatron.add_ranklens_args(parser)``.
"""

from ranklens_megatron.arguments import add_ranklens_args

__all__ = ["add_ranklens_args"]
