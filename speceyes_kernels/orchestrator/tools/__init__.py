"""Tools of the agents: what they may call, and the sandbox that runs their code."""
