"""Values given by users: lengths, sizes, numbers and token ids; each is checked, or refused in one sentence."""
