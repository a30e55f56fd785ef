"""`scripts/launch`: from a cluster's file and a config to a run on that cluster.

cluster.py            what is common to both kinds of files
ray_file.py           a file for `ray up`, checked, Ray's own check included
own_machines.py       its addresses and marks, where the machines are there already
kubernetes_file.py    a RayJob for KubeRay, checked
network_policy.py     who its pods let in
run.py                the config as the cluster gets it
here.py               what must be on this machine
plan.py               the commands, in order
__main__.py           runs or prints them
"""
