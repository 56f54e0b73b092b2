"""``ranklens run``: a Hydra application over ``configs/``: records a target once, replays its ranks."""
