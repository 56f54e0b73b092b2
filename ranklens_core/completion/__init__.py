"""How a result arrives at its time: ``cpu`` delivers from a thread, or from the thread that waits."""
