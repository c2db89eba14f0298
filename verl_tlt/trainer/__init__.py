"""The TLT trainers: verl's v1 trainers with early leave, spot training, publication and metrics."""
