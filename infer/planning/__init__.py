"""Planning: compiles a step for a slice of TPUs and says whether it fits, what binds it and what it sends."""
