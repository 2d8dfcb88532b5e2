"""Plan (pure) and apply: releases, activation, rollback, history."""
