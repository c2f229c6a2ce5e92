"""Lower bounds: message passing (TRW-S), Lagrangian relaxation, cycle tightening."""
