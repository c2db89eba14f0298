"""`verl-tlt doctor`: can TLT run here, with this recipe?"""
