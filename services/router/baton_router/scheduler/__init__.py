"""Choosing instances for requests.

- ``placer``: one decision, from a prompt to reservations on the chosen instances. ``placement``: its input and result.
- ``policy``: what a policy gets and answers, and the choice by its scores. ``policies``: the policies.
- ``roster``, ``kernels``: the candidates as columns, and the passes over them in C.
- ``speeds``: learnt speeds. ``decision``: the memory of decisions. ``metrics``: metrics of placements.
"""
