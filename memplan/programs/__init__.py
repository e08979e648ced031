"""What is proved: linear and integer programs, and bounds from them.

There are three programs, each with a file that states its inequalities (``*_program``), and one
that solves it again and again with more of them (``*_refinement``):

- ``moment``: what is there at a few moments of the step, for schedules in any order;
- ``stage``: Checkmate's, over all of the step, for schedules in base order;
- ``mirror``: which forward ops MXNet's mirroring recomputes.

What they prove is a list of facts (:mod:`memplan.programs.proof`).
"""
