import sys, time
from tests.sim.simulation import Failed, simulate
a=int(sys.argv[1]); b=int(sys.argv[2])
T=time.time(); C=time.process_time()
for s in range(a,b):
    t=time.time(); c=time.process_time()
    try: r=simulate(s)
    except Failed as e: print(f"{s} FAILED", str(e).split("\n\n")[-1][:1500], flush=True)
    else: print(round(time.time()-t,2), round(time.process_time()-c,2), r.seed, r.steps, f"v{r.versions} a{r.aborted} l{r.launches} r{r.restarts} d{r.deleted} {r.virtual_s:.0f}s", flush=True)
print(time.time()-T, time.process_time()-C)
