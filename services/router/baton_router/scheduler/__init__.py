"""Choosing instances for requests.

- ``placer``: one decision, from a prompt to reservations on the chosen instances, and the metrics of decisions.
- ``placement``: input and result of a decision.
- ``policy``: what a policy gets and answers, and the choice by its scores. ``policies``: the policies.
- ``roster``, ``kernels``: the candidates as columns, and the passes over them in C.
- ``speeds``: learnt speeds. ``decision``: the memory of decisions.
"""
