"""HLO text: instructions (`module`), replica groups (`replica_groups`), collectives (`collectives`), their producers
and consumers (`dataflow`), and live ranges (`live_ranges`)."""
