"""``ranklens run``: a Hydra application over ``configs/`` that records a target once and replays its ranks."""
