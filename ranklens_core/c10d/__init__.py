"""The boundary RankLens stands on: every c10d operator of torch, decoded into one ``Call``.

``ops`` knows the operators, ``interpose`` puts a handler in their place, ``call`` is what the
handler gets, ``work`` what it gives back, ``groups`` names process groups the same way in every
run, ``world`` builds a one-rank world that looks like the whole job.
"""
