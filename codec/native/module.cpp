// The only file that knows Python: converts arguments and releases the GIL.
#include <nanobind/nanobind.h>

NB_MODULE(_native, m) { m.doc() = "weightcast codec kernels"; }
