import sys, time
from tests.sim.simulation import simulate
a=int(sys.argv[1]); b=int(sys.argv[2])
for s in range(a,b):
    t=time.time(); r=simulate(s); print(round(time.time()-t,2), r, flush=True)
