"""Record the golden numbers again from the packages that they came from; `tools/record_golden.py` is the command.

No number that is written comes from ropewalk. `class_defaults` asks it which model types it knows, to name new ones;
`released` holds its ropes against what the models do.
"""
