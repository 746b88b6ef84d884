"""Analysis of compiled HLO modules: parsed text, executions, FLOPs, bytes, collectives, memory."""
