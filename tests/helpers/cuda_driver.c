/* A CUDA driver without a device, for triton's launcher: it notes what kernels are launched with. */
#include <cuda.h>
#include <stdio.h>
#include <string.h>

#define PUBLIC __attribute__((visibility("default")))

static int sizes[256], count;
static FILE *notes;

/* Sizes in bytes of a kernel's parameters, which a driver reads from its code. */
PUBLIC void noted_parameters(const int *bytes, int number) {
  memcpy(sizes, bytes, number * sizeof(int));
  count = number;
}

PUBLIC void noted_into(const char *path) { notes = fopen(path, "a"); }

PUBLIC CUresult cuLaunchKernelEx(const CUlaunchConfig *config, CUfunction function, void **parameters,
                                 void **extra) {
  fprintf(notes, "%u %u %u, %u threads, %u bytes, %u attributes, stream %p, %p:", config->gridDimX,
          config->gridDimY, config->gridDimZ, config->blockDimX, config->sharedMemBytes, config->numAttrs,
          (void *)config->hStream, (void *)function);
  for (int i = 0; i < count; i++) {
    unsigned long long value = 0;
    memcpy(&value, parameters[i], sizes[i]);
    fprintf(notes, " %llx", value);
  }
  fputc('\n', notes);
  fflush(notes);
  return CUDA_SUCCESS;
}

PUBLIC CUresult cuModuleLoadData(CUmodule *module, const void *image) {
  static size_t number = 0;
  *module = (CUmodule)(++number << 8);
  return CUDA_SUCCESS;
}

PUBLIC CUresult cuModuleGetFunction(CUfunction *function, CUmodule module, const char *name) {
  *function = (CUfunction)((size_t)module + 1);
  return CUDA_SUCCESS;
}

PUBLIC CUresult cuPointerGetAttribute(void *data, CUpointer_attribute attribute, CUdeviceptr pointer) {
  *(CUdeviceptr *)data = pointer;
  return CUDA_SUCCESS;
}

PUBLIC CUresult cuFuncGetAttribute(int *value, CUfunction_attribute attribute, CUfunction function) {
  *value = attribute == CU_FUNC_ATTRIBUTE_MAX_THREADS_PER_BLOCK ? 1024 : 0;
  return CUDA_SUCCESS;
}

PUBLIC CUresult cuDeviceGetAttribute(int *value, CUdevice_attribute attribute, CUdevice device) {
  *value = 227 << 10; /* of everything, bytes of shared memory among it */
  return CUDA_SUCCESS;
}

PUBLIC CUresult cuCtxGetCurrent(CUcontext *context) {
  *context = (CUcontext)1;
  return CUDA_SUCCESS;
}

#define NOTHING(name, ...) \
  PUBLIC CUresult name(__VA_ARGS__) { return CUDA_SUCCESS; }
NOTHING(cuCtxSetCurrent, CUcontext context)
NOTHING(cuDeviceGet, CUdevice *device, int number)
NOTHING(cuDevicePrimaryCtxRetain, CUcontext *context, CUdevice device)
NOTHING(cuFuncSetAttribute, CUfunction function, CUfunction_attribute attribute, int value)
NOTHING(cuFuncSetCacheConfig, CUfunction function, CUfunc_cache config)
NOTHING(cuGetErrorString, CUresult error, const char **text)
NOTHING(cuCtxGetLimit, size_t *value, CUlimit limit)
NOTHING(cuCtxSetLimit, CUlimit limit, size_t value)
NOTHING(cuModuleUnload, CUmodule module)

PUBLIC CUresult cuDriverGetVersion(int *version) {
  *version = 13000;
  return CUDA_SUCCESS;
}

PUBLIC CUresult cuCtxGetDevice(CUdevice *device) {
  *device = 0;
  return CUDA_SUCCESS;
}

PUBLIC CUresult cuStreamIsCapturing(CUstream stream, CUstreamCaptureStatus *status) {
  *status = CU_STREAM_CAPTURE_STATUS_NONE;
  return CUDA_SUCCESS;
}
