// What the processor can do, asked once.
#pragma once

namespace weightcast {

// Whether everything may run that the AVX2 files are compiled with; false on other architectures.
bool has_avx2();

}  // namespace weightcast
