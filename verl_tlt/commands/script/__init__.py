"""How a shell script starts `main_ppo`: read, or run with stand-ins."""
