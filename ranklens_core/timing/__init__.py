"""When a call's result arrives: recorded arrivals, estimates, the simulation of a whole job."""
