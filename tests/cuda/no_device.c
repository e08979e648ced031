/* NVIDIA's driver on a machine without a device: every call says so. With it MXNet's CUDA wheel can
   be imported there, and runs on the CPU ("make test-cu112"). */
enum { SUCCESS = 0, NO_DEVICE = 100 };

int cuInit(unsigned flags) { return NO_DEVICE; }
int cuDriverGetVersion(int *version) { *version = 11020; return SUCCESS; }
int cuDeviceGet(void) { return NO_DEVICE; }
int cuDevicePrimaryCtxRetain(void) { return NO_DEVICE; }
int cuGetErrorString(void) { return NO_DEVICE; }
int cuGraphKernelNodeGetParams(void) { return NO_DEVICE; }
int cuGraphNodeGetType(void) { return NO_DEVICE; }
int cuLaunchKernel(void) { return NO_DEVICE; }
int cuModuleGetFunction(void) { return NO_DEVICE; }
int cuModuleLoadData(void) { return NO_DEVICE; }
int cuModuleLoadDataEx(void) { return NO_DEVICE; }
int cuModuleUnload(void) { return NO_DEVICE; }
