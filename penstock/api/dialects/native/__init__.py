"""Penstock's own routes."""

from penstock.api.dialects.native import entities, maxsim, sparse, zero_shot

ROUTES = (*sparse.ROUTES, *zero_shot.ROUTES, *entities.ROUTES, *maxsim.ROUTES)
