"""How a shell script starts `main_ppo`, read without running it."""
